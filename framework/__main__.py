"""The program `dsf`, also `python -m framework`."""

import gc
import os
import signal
import sys

from framework.errors import EXIT_CONFIG, EXIT_STOPPED
from framework.system.garbage import collect_seldom


def main() -> int:
    """Run the command line, or print one line if a package of the base install is missing."""
    if os.getpid() == 1 and sys.argv[1:2] in (["train"], ["launch"]):
        # Process 1 of a container never gets a signal that it does not handle, and the imports take
        # half a second.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(EXIT_STOPPED))
    # before a launcher adds to it; see report/end_summary.py
    os.environ.setdefault("DSF_SHELL_PATH", os.environ.get("PATH", ""))
    collect_seldom()
    try:
        from framework.cli import main as run

        code = run()
        gc.freeze()  # the interpreter would search all that is there for garbage on its way out
        return code
    except KeyboardInterrupt:  # the imports take half a second
        return 130
    except ModuleNotFoundError as error:
        if error.name not in ("pydantic", "pydantic_core", "yaml", "ruamel", "rich"):
            raise
        print(
            f"{sys.executable} has no package {error.name}: this is not the environment of "
            "dsf-trainer; source .venv/bin/activate, call ./launch.sh instead of dsf, or pip "
            "install -e . in the checkout [package-missing]",
            file=sys.stderr,
        )
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
