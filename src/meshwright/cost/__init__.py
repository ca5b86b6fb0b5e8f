"""The cost chain: work item in, seconds out, with where they come from and how sure that is.

Measured table -> fitted curve -> roofline. A link of the chain either knows the item or passes it on. What
is priced here is one rank's share: a kernel on one device, a collective over one group.
"""

from meshwright.cost.chain import Costs, Estimate
from meshwright.cost.framework import Framework, frameworks
from meshwright.cost.framework import load as load_framework
from meshwright.cost.standard import standard, standard_on
from meshwright.cost.unknown import software

__all__ = ["Costs", "Estimate", "Framework", "frameworks", "load_framework", "software", "standard", "standard_on"]
