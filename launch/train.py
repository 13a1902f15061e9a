"""What launchers start on every rank: `deepspeed launch/train.py --deepspeed ds_configs/zero2.json
[--flags]`.
"""

from fmmeta.cli import train

if __name__ == "__main__":
    train()
