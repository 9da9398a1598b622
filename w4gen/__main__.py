"""`python -m w4gen` is `w4gen`."""

from w4gen.cli import main

if __name__ == "__main__":
    main()
