"""Why a number is not given, as a code and its values; scaling/reason_words.py makes sentences of
them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reason:
    """A code of scaling/reason_words.py with the values that its sentence names."""

    code: str
    values: dict[str, object] = field(default_factory=dict)


def reason(code: str, **values: object) -> Reason:
    return Reason(code, values)
