"""The ceiling: nothing but an aiohttp loop that posts every body of a file, N at a time, and drops the answers."""

import asyncio
import sys
from itertools import count

import aiohttp
import orjson
import uvloop


async def main(url: str, path: str, in_flight: int) -> None:
    """Posts the requests of the batch file at `path` to the server at `url`."""
    with open(path, "rb") as file:  # noqa: ASYNC230 - before the clock starts
        bodies = [orjson.dumps(orjson.loads(line)["body"]) for line in file]
    places = count()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:

        async def run() -> None:
            while (place := next(places)) < len(bodies):
                async with session.post(f"{url}/chat/completions", data=bodies[place]) as reply:
                    await reply.read()

        await asyncio.gather(*(run() for _ in range(in_flight)))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
