"""``python -m daskdl`` is the command ``daskdl``."""

from daskdl.cli import main

if __name__ == "__main__":
    main()
