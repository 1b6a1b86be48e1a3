"""``python -m aphoton``: the command line."""

from aphoton.cli.app import main

if __name__ == "__main__":
    main()
