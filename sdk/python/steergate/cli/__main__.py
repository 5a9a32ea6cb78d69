"""`python -m steergate.cli` is `steerctl`."""

from . import main

if __name__ == "__main__":
    main()
