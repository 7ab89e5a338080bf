"""Sixteen prompts at once over one channel: `python examples/many_streams.py 127.0.0.1:50051`."""

from __future__ import annotations

import asyncio
import sys

from forefetch import Client


async def main(address: str) -> None:
    """Runs them concurrently; the router batches them into the same steps."""
    prompts = [f"Number {i} is" for i in range(16)]
    async with Client(address) as client:
        answers = await asyncio.gather(*(client.complete(prompt, max_tokens=24, timeout=60) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"{answer.ttft_ms:7.1f} ms  {prompt}{answer.text!r}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
