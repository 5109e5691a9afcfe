"""Leave a command as a shell expects: quietly where its reader has gone, with 130 after Ctrl-C."""

import os
import sys


def run(main, *arguments) -> int:
    """main's exit code; 1 without a traceback where the output is closed early, as by `| head`; 130 where interrupted."""
    try:
        code = main(*arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # Python flushes stdout once more at its end
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
