import sys

from paceline.cli.main import main

if __name__ == "__main__":  # ranks that fork from it import it under another name
    sys.exit(main())
