"""``python -m aphoton``: the command line."""

from aphoton.cli import main

if __name__ == "__main__":
    main()
