"""Lock the files of a folder against other processes, on this machine or another.

The locks are POSIX's (fcntl.lockf): the kernel drops them with the process, however that dies, and no child inherits
them. Their trap: a process loses one by closing ANY descriptor of its file, so a process has one Locks of a folder and
looks at no lock that it holds.
"""

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class Locks:
    """Locks in `folder`; `mutex` names the file that alone() locks. Where the file system has no locks `exist` becomes
    False at the first try, a line says so, and everything seems free."""

    def __init__(self, folder: Path, mutex: str):
        self.exist = True
        self._folder, self._mutex = folder, mutex

    def take(self, name: str, create: bool = True, wait: bool = False) -> int | None:
        """A descriptor that holds the lock until it is closed; None where another process has it."""
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        descriptor = os.open(self._folder / name, flags, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in NO_LOCKS_HERE:
                if self.exist:
                    print(f"{self._folder}: this file system has no locks ({os.strerror(error.errno)}): each worker takes its "
                          f"own share of the input files alone", file=sys.stderr)
                self.exist = False
                return descriptor
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return None
            raise
        except BaseException:       # Ctrl-C while it waits
            os.close(descriptor)
            raise
        return descriptor

    def is_taken(self, name: str) -> bool:
        """Whether another process has the lock now. To be asked within alone(): looking at a lock holds it a moment."""
        try:
            descriptor = self.take(name, create=False)
        except FileNotFoundError:
            return False
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    @contextmanager
    def alone(self, create: bool = False) -> Iterator[None]:
        """Hold the mutex, after whoever has it. With `create` the folder is made; else FileNotFoundError where it is gone."""
        while True:
            if create:
                self._folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError if create else ()):
                descriptor = self.take(self._mutex, create, wait=True)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(self._folder / self._mutex)):
                        break
                os.close(descriptor)        # it was removed while we waited: once more
        try:
            yield
        finally:
            os.close(descriptor)
