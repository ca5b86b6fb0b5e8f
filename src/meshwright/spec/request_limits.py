"""Limits of serving workloads, which reading and drawing them share."""

#: Requests where nobody says how many, and the most that are simulated.
USUAL_REQUESTS, MOST_REQUESTS = 1000, 10_000_000
#: Largest length in tokens and largest rate in requests a second: above, a slip of the keyboard.
LONGEST, FASTEST = 10**9, 1e6
#: Most tenants, adapters or groups of equal prefixes.
MOST_OF_A_KIND = 10**6
#: Most block hashes of all requests together: half a GiB, and a few times as much while they are drawn.
MOST_HASHES = 1 << 26
