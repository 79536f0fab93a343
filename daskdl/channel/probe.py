"""Whether anybody still listens at the address of a worker."""

import asyncio

from distributed.comm import get_address_host_port, parse_address

PROBED = ("tcp", "tls")  # others do not say at once that nobody is there


async def is_listening(address: str, timeout_s: float) -> bool:
    """Ask the operating system of a worker's host, not the worker.

    Dask's own way to connect tries again for long when it is refused.

    Args:
        address: Of Dask's kind, with its scheme.
        timeout_s: A host that says nothing in this time counts as one where
            nobody listens, seconds.

    Returns:
        True also where that cannot be asked.
    """
    scheme, _ = parse_address(address)
    if scheme not in PROBED:
        return True
    host, port = get_address_host_port(address)
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(host, port), timeout_s
        )
    except OSError:
        return False
    writer.close()
    return True
