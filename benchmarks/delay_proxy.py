"""A proxy on loopback that holds every byte for some milliseconds, in both directions.

python benchmarks/delay_proxy.py PORT MS        prints its own port
"""

from __future__ import annotations

import asyncio
import sys


async def proxy(port: int, seconds: float) -> None:
    """Hold every byte for some seconds, in both directions."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            loop.call_later(seconds, writer.write, data)
        loop.call_later(seconds, writer.close)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(proxy(int(sys.argv[1]), float(sys.argv[2]) / 1e3))
