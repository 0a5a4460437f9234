"""``python -m attar``: the command line."""

from attar.cli.main import main

if __name__ == "__main__":
    main()
