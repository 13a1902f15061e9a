"""What launchers start on every rank: `deepspeed launch/train.py --deepspeed ds_configs/zero2.json
[--flags]`.
"""

import sys

from fmmeta.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
