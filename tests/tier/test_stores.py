"""All stores keep the same promises; each has a limit of its own kind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvikk.errors import ConfigError
from kvikk.tier.files import FsspecStore
from kvikk.tier.host import HostStore
from kvikk.tier.redis import RedisStore
from kvikk.tier.store import Store
from kvikk.types import BlockKey
from tier.servers import RedisServer, running_redis

MAKERS = ["host", "folder", "memory", "redis"]


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=MAKERS)
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Makes empty stores without a limit."""
    made: list[Store] = []

    def make() -> Store:
        if request.param == "host":
            made.append(HostStore(10**9))
        elif request.param == "redis":
            server: RedisServer = request.getfixturevalue("redis")
            with server.client() as client:
                client.flushall()
            made.append(RedisStore(server.url, 5.0))
        else:
            root = str(tmp_path) if request.param == "folder" else "memory://tier"
            made.append(FsspecStore(f"{root}/{len(made)}-{time.monotonic_ns()}", 10**9))
        return made[-1]

    if request.param == "redis":
        request.getfixturevalue("redis")
    yield make
    for store in made:
        store.close()


steps = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "contains", "get"]), st.lists(st.integers(0, 5), max_size=4)),
    max_size=25,
)


@given(history=steps)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_store_is_a_mapping(new_store: Callable[[], Store], history: list[tuple[str, list[int]]]) -> None:
    store, model = new_store(), dict[BlockKey, bytes]()
    for what, numbers in history:
        keys = [key(number) for number in numbers]
        if what == "get":
            assert store.get(keys) == [model.get(key) for key in keys]
            continue
        for each in keys:
            if what == "put":
                model[each] = each * 9
                store.put(each, each * 9)
            elif what == "delete":
                model.pop(each, None)
                store.delete(each)
            else:
                assert store.contains(each) == (each in model)


def test_what_is_read_while_it_is_written_is_whole_or_not_there(new_store: Callable[[], Store]) -> None:
    store, record, seen, is_done = new_store(), os.urandom(300_000), set(), threading.Event()

    def write() -> None:
        for _ in range(20):
            store.put(key(1), record)
            store.delete(key(1))
        store.put(key(1), record)
        is_done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not is_done.is_set():
        seen.update(store.get([key(1)]))
    writer.join()
    assert seen <= {record, None}
    assert store.get([key(1)]) == [record]


# The host's memory


@given(sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=60))
def test_the_hosts_memory_never_holds_more_than_it_may(sizes: list[tuple[int, int]]) -> None:
    store = HostStore(100)
    for number, size in sizes:
        store.put(key(number), bytes(size))
        assert store.size_bytes == sum(len(record or b"") for record in store.get([key(n) for n in range(10)]))
        assert store.size_bytes <= 100
        assert store.contains(key(number))


def test_what_was_used_longest_ago_makes_room_and_too_large_a_record_takes_none() -> None:
    store = HostStore(30)
    for number in (1, 2, 3):
        store.put(key(number), bytes(10))
    store.get([key(1)])
    store.put(key(9), bytes(31))
    store.put(key(4), bytes(10))
    assert [store.contains(key(number)) for number in (1, 2, 3, 4, 9)] == [True, False, True, True, False]


# Folders


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_folder_keeps_to_its_limit_and_the_oldest_go() -> None:
    store = FsspecStore("memory://limited", 100)
    for number in range(30):
        store.put(key(number), bytes(10))
        assert sum(info["size"] for info in fsspec.filesystem("memory").find("/limited", detail=True).values()) <= 100
    assert [store.contains(key(number)) for number in (0, 19, 20, 29)] == [False, False, True, True]
    store.put(key(99), bytes(101))
    assert not store.contains(key(99))


def test_another_store_over_the_folder_finds_its_records_and_counts_them(tmp_path: Path) -> None:
    first = FsspecStore(str(tmp_path), 100)
    for number in range(10):
        first.put(key(number), bytes(10))
        os.utime(files(tmp_path)[0].parent / f"{key(number).hex()}", (number, number))
    second = FsspecStore(f"file://{tmp_path}", 100)
    assert second.get([key(3)]) == [bytes(10)]
    second.put(key(20), bytes(30))
    assert [second.contains(key(number)) for number in (0, 1, 2, 3, 9, 20)] == [False, False, False, True, True, True]
    assert second.size_bytes == sum(path.stat().st_size for path in files(tmp_path)) == 100
    assert first.get([key(0)]) == [None], "what another one deleted is a miss"
    first.put(key(21), bytes(100))
    assert len(files(tmp_path)) <= 2


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(str(tmp_path), 100)
    store.put(key(1), bytes(10))

    def fail(*paths: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "mv", fail)
        with pytest.raises(OSError, match="No space left"):
            store.put(key(2), bytes(10))
    assert len(files(tmp_path)) == 1
    assert store.size_bytes == 10
    store.put(key(2), bytes(10))
    assert store.contains(key(2))


def test_a_folder_that_cannot_be_and_a_file_system_that_is_not_there_are_refused_with_the_way_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="the folder cannot be made"):
        FsspecStore(str(tmp_path / "file" / "folder"), 100)
    with pytest.raises(ConfigError, match=r"adlfs.*pip install adlfs"):
        FsspecStore("abfs://user:secret@bucket/folder", 100)
    with pytest.raises(ConfigError, match="nosuch://bucket") as refused:
        FsspecStore("nosuch://user:secret@bucket", 100)
    assert "secret" not in str(refused.value)


# Redis


def test_keys_have_the_prefix_and_the_life_that_the_url_says(redis: RedisServer) -> None:
    store = RedisStore(f"{redis.url.replace('redis:', 'valkey:')}?prefix=mine:&ttl=100", 5.0)
    store.put(key(5), b"record")
    with redis.client() as client:
        name = b"mine:" + key(5).hex().encode()
        assert client.get(name) == b"record"
        assert 90 < client.ttl(name) <= 100
    assert RedisStore(redis.url, 5.0).get([key(5)]) == [None]
    store.close()


def test_a_server_that_was_started_anew_is_used_again(redis: RedisServer) -> None:
    store = RedisStore(redis.url, 5.0)
    store.put(key(5), b"record")
    redis.kill()
    with pytest.raises(Exception, match=r"refused|closed|reset"):
        store.get([key(5)])
    redis.start()
    assert store.get([key(5)]) == [None]
    store.put(key(5), b"record")
    assert store.get([key(5)]) == [b"record"]


def test_a_server_that_is_full_refuses_to_write(redis: RedisServer) -> None:
    store = RedisStore(redis.url, 5.0)
    with redis.client() as client:
        client.config_set("maxmemory", 3_000_000)
        with pytest.raises(Exception, match=r"OOM|maxmemory"):
            any(store.put(key(number), bytes(100_000)) for number in range(100))  # type: ignore[func-returns-value]
        client.config_set("maxmemory", 0)
        client.flushall()


def test_without_redis_py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"redis://host:6379/0 needs redis-py: pip install 'kvikk\[redis\]'"):
        RedisStore("redis://user:secret@host:6379/0", 1.0)


def test_a_url_that_redis_does_not_understand_is_refused(redis: RedisServer) -> None:
    with pytest.raises(ConfigError, match="ttl is 'soon': it must be a whole number of seconds above 0"):
        RedisStore(f"{redis.url}?ttl=soon", 5.0)
    with pytest.raises(ConfigError, match=r"is not understood.*colour"):
        RedisStore(f"{redis.url}?colour=red", 5.0)
