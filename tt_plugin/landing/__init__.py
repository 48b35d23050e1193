"""Where pulled bytes come to rest on a Tenstorrent device.

In mode host, parcels are the prefill side's blocks as they are, converted in host memory (`host.HostLanding`, which
alone needs torch).  In mode hawk they are packed:

*Path*: direct (reads end in the banks, through their host addresses) or bounce (reads end in host memory, and the
device is written from there).  *Placement*: pool (where the kernels read) or staged (one contiguous buffer in each
bank, then copies inside the device).
"""

from .bounce import BounceLanding
from .pool import PoolLanding
from .provider import LandingChoice, from_kv_caches, make_landing
from .staged import StagedLanding
from .windows import WindowLanding, WindowPools

__all__ = [
    "BounceLanding",
    "LandingChoice",
    "PoolLanding",
    "StagedLanding",
    "WindowLanding",
    "WindowPools",
    "from_kv_caches",
    "make_landing",
]
