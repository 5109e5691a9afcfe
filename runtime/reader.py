"""Read tensors from a checkpoint without running what its pickled metadata names.

torch.distributed.checkpoint (DCP) unpickles `.metadata` without a look, and whatever that calls no tensor too: reading an
untrusted folder runs its code (pytorch#189308, #190877). This reader knows the dozen harmless classes that the metadata of
tensors is made of, refuses the rest, and reads no file but those that were verified.
"""

import pickle
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata


class TensorReader(dcp.FileSystemReader):
    """DCP's reader, except that its pickled metadata can name nothing but tensors in the files that were verified."""

    def __init__(self, path: Path, files: dict):
        super().__init__(path)
        self.files = files

    def read_metadata(self, *args, **kwargs) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        # What is no tensor would be unpickled by DCP without a look, whatever was asked for under its name.
        if not all(isinstance(item, TensorStorageMetadata) for item in metadata.state_dict_metadata.values()):
            raise ValueError("the checkpoint's .metadata holds something else than tensors, which loading could run as code")
        for place in metadata.storage_data.values():
            if place.relative_path not in self.files or getattr(place, "transform_descriptors", None):
                raise ValueError(f"the checkpoint's .metadata points at {place.relative_path!r}, which the manifest does not "
                                 f"list")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "_MEM_FORMAT_ENCODING"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size", "float32", "bfloat16", "float16", "int64", "strided"},
        "torch.serialization": {"_get_layout"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "PurePosixPath"},
    }

    def find_class(self, module: str, name: str):
        if name in self.ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"the checkpoint's .metadata names {module}.{name}, which no checkpoint of ours contains: "
                          f"it is refused because loading it could run code")
