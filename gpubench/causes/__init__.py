"""Why transfers go through host memory, as NCCL's log shows it. A new cause is one file and one line here.

The order is that in which NCCL comes to them; the first that applies is what to look at first.
"""

from gpubench.causes.by_design import BY_DESIGN
from gpubench.causes.cause import Cause
from gpubench.causes.environment import ENVIRONMENT
from gpubench.causes.gpudirect import GPUDIRECT
from gpubench.causes.mnnvl import MNNVL
from gpubench.causes.refused import REFUSED
from gpubench.causes.shm_not_shared import SHM_NOT_SHARED
from gpubench.causes.sockets import SOCKETS
from gpubench.causes.unknown import UNKNOWN

CAUSES: tuple[Cause, ...] = (
    ENVIRONMENT,
    SHM_NOT_SHARED,
    BY_DESIGN,
    REFUSED,
    MNNVL,
    SOCKETS,
    GPUDIRECT,
    UNKNOWN,
)
