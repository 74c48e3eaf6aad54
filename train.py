"""What `deepspeed`, `torchrun` or plain `python` start on every rank: train.py --config FILE
[key=value ...].
"""

from framework.script import main

if __name__ == "__main__":
    main()
