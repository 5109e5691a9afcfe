"""Tell the faults that waiting may mend from those of a file, of this machine and of the user."""

import gzip
import zlib

from runtime.cli import UserError


class BadLine(ValueError):
    """A line that is not what its file should hold."""


def quiet_datasets():
    """The package, silent, and without patience of its own: 20 failures of 23 s with 5 s between them are nine minutes."""
    import datasets
    import huggingface_hub
    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_RETRY_INTERVAL = datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL = 0
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    huggingface_hub.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False     # it would be loaded for nothing: 4 s, 180 MB
    return datasets


def faults() -> tuple[type[Exception], ...]:
    """What the network, the Hub and a damaged file make datasets raise."""
    import httpx2
    import pyarrow
    from huggingface_hub.errors import HFValidationError
    return OSError, EOFError, zlib.error, httpx2.HTTPError, pyarrow.ArrowException, BadLine, HFValidationError


def is_local(error: Exception) -> bool:
    """Whether this machine's disk is to blame, such as a full one."""
    return isinstance(error, OSError) and error.filename is not None


def is_content(error: Exception) -> bool:
    """Whether the file is to blame rather than the network."""
    import pyarrow
    from huggingface_hub.errors import EntryNotFoundError
    return isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile, pyarrow.ArrowException, BadLine, FileNotFoundError,
                              EntryNotFoundError))


def is_broken_off(error: BaseException | None) -> bool:
    """Whether an answer had begun and did not come to its end."""
    import httpx2
    return error is not None and (isinstance(error, (httpx2.ReadError, httpx2.ReadTimeout, httpx2.RemoteProtocolError)) or
                                  is_broken_off(error.__cause__))


def refused(error: BaseException | None, dataset: str, revision: str | None, is_sure: bool = False) -> UserError | None:
    """The sentence for an answer of the Hub that no second try will change; None for any other error.

    is_sure: the data set was there before, so only the Hub's own word counts. A 401 or 403 without it, or by the servers that
    hold the large files, may come of a link that ran out or a server that is unwell."""
    from huggingface_hub import HfApi, errors
    if is_sure and isinstance(error, errors.HfHubHTTPError):
        is_hub = str(error.response.url).startswith(HfApi().endpoint + "/")
        if not is_hub or "X-Error-Code" not in error.response.headers:
            return None
    at = f"{dataset}@{revision}" if revision else dataset
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{dataset} is gated: accept its terms at https://huggingface.co/datasets/{dataset}, then log in with "
                           f"`hf auth login` or set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(f"there is no data set {dataset} on the Hub, or it is private: it may have moved; look for it at "
                           f"https://huggingface.co/datasets, or log in with `hf auth login`")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{at}: the data set has no such revision; they are listed at "
                           f"https://huggingface.co/datasets/{dataset}/commits/main")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{dataset!r} is no data set's name: it must look like OWNER/NAME")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return UserError(f"{at}: the Hub refuses it ({error.response.status_code}): log in with `hf auth login` or set a "
                           f"HF_TOKEN that may read it")
    return refused(error.__cause__, dataset, revision, is_sure) if error and error.__cause__ else None


def brief(error: Exception) -> str:
    """An error in a few words on one line."""
    if isinstance(error, ConnectionError) and error.__cause__:
        error = error.__cause__     # datasets says "Server Disconnected", whatever it was
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
