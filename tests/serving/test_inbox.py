"""The way of an answer's pieces from the engine's thread to the event loop."""

import asyncio
import threading

from icejax.serving.answers import Inbox


def read_of(inbox: Inbox, count: int, patience: float | None = None) -> list:
    async def read() -> list:
        return [await inbox.get(patience) for _ in range(count)]

    return asyncio.wait_for(read(), 60)


def test_pieces_of_a_busy_loop_come_in_order_and_wake_it_once(monkeypatch):
    async def main() -> None:
        loop, inbox, wakes = asyncio.get_running_loop(), Inbox(), []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *asked: wakes.append(asked) or call(*asked))
        thread = threading.Thread(target=lambda: [inbox.put(number % 2, number) for number in range(9)])
        thread.start()
        thread.join()  # the loop stands still meanwhile
        assert len(wakes) == 1
        assert await read_of(inbox, 9) == [(number % 2, number) for number in range(9)]
        await asyncio.sleep(0)  # the wake-up runs; since Python 3.12 the read above does not wait for the loop
        inbox.put(0, "late")
        assert await read_of(inbox, 1) == [(0, "late")] and len(wakes) == 2

    asyncio.run(main())


def test_every_piece_wakes_a_reader_that_waits():
    async def main() -> None:
        inbox, taken = Inbox(), threading.Semaphore(0)

        def work() -> None:
            for number in range(200):
                inbox.put(0, number)
                assert taken.acquire(timeout=60)

        thread = threading.Thread(target=work)
        thread.start()
        for number in range(200):
            assert await asyncio.wait_for(inbox.get(None), 60) == (0, number)
            taken.release()
        thread.join(60)

    asyncio.run(main())


def test_silence_is_told_of_once_per_patience_and_pieces_put_it_off():
    async def main() -> None:
        loop, inbox, patience = asyncio.get_running_loop(), Inbox(), 0.2
        begun = loop.time()
        assert await read_of(inbox, 2, patience) == [None, None]
        assert loop.time() - begun >= 2 * patience - 0.01
        begun = loop.time()
        loop.call_later(0.6 * patience, inbox.put, 0, "a piece")
        assert await read_of(inbox, 2, patience) == [(0, "a piece"), None]
        assert loop.time() - begun >= 1.6 * patience - 0.01
        inbox.close()
        with_none = asyncio.create_task(inbox.get(patience))
        await asyncio.sleep(1.5 * patience)
        assert not with_none.done()  # no timer is left
        with_none.cancel()

    asyncio.run(main())
