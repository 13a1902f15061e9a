"""`python -m fmmeta COMMAND`, also under launchers: `torchrun --nproc_per_node 2 -m fmmeta evaluate`."""

from fmmeta.cli import main

if __name__ == "__main__":
    main()
