"""Run the `tidelog` command as `python -m tidelog`."""

from tidelog.cli.main import main

if __name__ == "__main__":
    main()
