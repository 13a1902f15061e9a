"""`python -m fmmeta COMMAND`, also under launchers: `torchrun --nproc_per_node 2 -m fmmeta evaluate`."""

import sys

from fmmeta.cli import main

if __name__ == "__main__":
    # `deepspeed --module fmmeta COMMAND` puts this flag before the command; it sets LOCAL_RANK as well
    main([word for place, word in enumerate(sys.argv[1:]) if place or not word.startswith("--local_rank=")])
