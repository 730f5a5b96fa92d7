"""A Ray cluster to work on: one that runs already, or one of this machine's processes for as long as it is needed.

Ray starts Dodo's workers in their own processes and, on a cluster, on other machines: Dodo must be installed there, and the model
and the folders that are named must be found there under the same names.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dodo.errors import DodoError, InputError

__all__ = ["joined"]


@contextmanager
def joined(address: str | None, *, cpus: int) -> Iterator[Any]:
    """Ray, connected inside.

    Args:
        address: of a cluster, as `ray.init` takes it ("auto" finds the one that this machine belongs to); None starts one here,
            which ends with the context. A connection that this process has already is used, and stays.
        cpus: that a cluster started here counts at least, whatever the machine has: more workers than cores then take turns.

    Raises:
        DodoError: Ray is not installed, or a cluster did not start here.
        InputError: no cluster answers at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import: nothing is sent anywhere unless it is asked for
    try:
        import ray
    except ImportError:
        raise DodoError("this needs Ray: pip install 'dodo-lm[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        if address is None:
            ray.init("local", num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, **quiet)
        else:
            ray.init(address, **quiet)
    except Exception as error:  # Ray has no class of its own for these
        what = "Ray did not start on this machine" if address is None else f"no Ray cluster answers at {address}"
        raise (DodoError if address is None else InputError)(f"{what}: {error}") from None
    try:
        yield ray
    finally:
        ray.shutdown()
