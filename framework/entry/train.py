"""train.py of an installed copy, which `launch` starts on every rank: train.py --config FILE
[key=value ...].
"""

from framework.script import main

if __name__ == "__main__":
    main()
