"""The precision that a finished run was trained in, as its summary.json says it.

runtime/summary.py writes it. This needs no torch, so that what reads records starts without it."""

from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]  # fields of FP8Config by name, as JSON has them
ARROW = ">"  # between the labels of a trunk and of its decay in another precision
BF16_BITS = 16


@dataclass(frozen=True)
class TrainedPrecision:
    """What the Linears of a run were computed in; several where a branch switched."""

    # "rowwise+head", or "bf16>rowwise" of a switched branch: for people, and the name under which
    # runs of one precision stand together; nothing is read out of it
    label: str
    # the run's fp8 section, None for BF16; those of its trunks come before it
    settings: tuple[Settings | None, ...]
    bits: int  # of the narrowest number format among them: 16, 8 or 4

    @property
    def is_bf16(self) -> bool:
        """Whether no Linear was in FP8, in the run or before it branched off."""
        return not any(self.settings)

    @property
    def is_switched(self) -> bool:
        """Whether the trunk was in another precision."""
        return len(self.settings) > 1

    @property
    def display_name(self) -> str:
        """With its number format, as in a figure: BF16, FP8 rowwise, FP4 nvfp4."""
        return precision_name(self.label, self.bits)


def precision_name(label: str, bits: int) -> str:
    """A label with the number format of so many bits before it."""
    return "BF16" if bits == BF16_BITS else f"FP{bits} {label}"


def read_precision(summary: dict[str, Any]) -> TrainedPrecision:
    """The precision of a summary.json. Raises KeyError, TypeError, ValueError or AttributeError
    where it is damaged."""
    precision = summary["precision"]
    recipe, switched_from = precision["recipe"], precision.get("switched_from")
    label = f"{switched_from}{ARROW}{recipe}" if switched_from else recipe
    if "fp8" not in precision:
        return _precision_in_label(label)
    settings = (*precision["switched_from_fp8"], precision["fp8"])
    _check_types(recipe, settings, precision["bits"])
    return TrainedPrecision(label, settings, precision["bits"])


def _check_types(recipe: Any, settings: tuple[Any, ...], bits: Any) -> None:
    """Raises TypeError for what runtime/summary.py does not write."""
    if not isinstance(recipe, str):
        raise TypeError(f"precision.recipe is {recipe!r}, not a text")
    if not all(section is None or isinstance(section, dict) for section in settings):
        raise TypeError("precision.fp8 or precision.switched_from_fp8 holds no settings")
    if type(bits) is not int:
        raise TypeError(f"precision.bits is {bits!r}, not a whole number")


# ------------------------------------------------------------- summaries older than precision.fp8


def _precision_in_label(label: str) -> TrainedPrecision:
    """The precision of an older summary, which has the label alone: the only place that reads one
    back."""
    settings = tuple(settings_in_label(part) for part in label.split(ARROW))
    bits = min(map(_bits, settings))
    return TrainedPrecision(label, settings, bits)


def settings_in_label(label: str) -> Settings | None:
    """What an older label names: fields that are not at their default, without all_gather and
    kernels=false, which it left out; None for BF16."""
    if label == "bf16":
        return None
    recipe, *words = label.split("+")
    settings: Settings = {"recipe": recipe}
    for word in words:
        name, equals, text = word.partition("=")
        if name in ("delayed", "bounded"):
            settings["scaling"] = name
        elif not equals:
            settings[name] = True
        elif name in ("include", "skip"):
            settings[name] = text.split(",")
        else:
            settings[name] = int(text)
    return settings


def _bits(settings: Settings | None) -> int:
    """Of the recipes that there were before summaries said it."""
    if settings is None:
        return BF16_BITS
    return 4 if settings["recipe"].startswith("nvfp4") else 8
