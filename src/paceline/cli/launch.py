"""The command `launch`: parse a spec, let its backend launch it, and follow the job."""

import sys

from paceline.cli.launch_parser import parse_launch
from paceline.cli.options import warn_of_readers


def launch(arguments: list[str]) -> int:
    """Launch a job, and follow it unless --detach is given; return its exit status."""
    options, source, overrides = parse_launch(arguments)
    from paceline.cli.launch_spec import spec_of
    from paceline.launch.backends import backend_of, manifest
    from paceline.launch.lifecycle import follow_to_end
    from paceline.launch.procs import described
    from paceline.launch.specs import ManifestSpec

    spec = spec_of(options, source, overrides)
    if isinstance(spec, ManifestSpec):
        print(*manifest.plan(spec))
        if len(spec.hosts) > 1:
            warn_of_readers("the token of the job")
        return 0
    backend = backend_of(spec)
    if options.dry_run:
        print("\n\n".join(map(str, backend.plan(spec))))
        return 0
    print(described(spec), file=sys.stderr)
    job = backend.launch(spec)
    print(f"{job.id}: started on {', '.join(spec.hosts)}", file=sys.stderr)
    return 0 if options.detach else follow_to_end(job)
