"""`python -m gpubench`: what mpirun launches, one process a rank."""

from gpubench.cli.app import main

if __name__ == "__main__":
    main()
