import sys

from paceline.system.signals import interrupts_end

if __name__ == "__main__":  # ranks import this module under another name
    with interrupts_end():
        from paceline.cli.main import main
    sys.exit(main())
