"""python -m scheduler_svc.recording.compact FILE END: replaces the files before number END by a snapshot.

The recorder runs it, at the lowest priority, when a recording has grown.
"""

import os
import sys
from pathlib import Path

from scheduler_svc.recording.files import RecordingError, read_header
from scheduler_svc.recording.replay import compact


def main() -> int:
    path, end = Path(sys.argv[1]), int(sys.argv[2])
    os.nice(19)
    try:
        compact(path, read_header(path), end)
    except (RecordingError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
