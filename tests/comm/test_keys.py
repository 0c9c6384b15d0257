from pathlib import Path

import pytest

from distflow.comm.addresses import run_tag, socket_dir, worker_address
from distflow.comm.keys import key_file, make_keys, read_keys, write_keys
from distflow.errors import UserError


def test_keys_are_read_as_they_were_written_and_are_for_the_user_alone(tmp_path: Path) -> None:
    path, keys = key_file(tmp_path), make_keys()
    write_keys(path, make_keys())
    write_keys(path, keys)
    assert read_keys(path) == keys
    assert path == tmp_path / "keys" / "run.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["run.key"]


def test_a_secret_is_never_printed() -> None:
    keys = make_keys()
    assert keys.secret.decode() not in repr(keys)


def test_a_missing_key_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.key: cannot read the run's key .* copy it from the host"):
        read_keys(key_file(tmp_path))


def test_a_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    write_keys(path, make_keys())
    path.chmod(0o640)
    with pytest.raises(UserError, match=r"expected a file of user \d+ with mode 0600, found owner \d+, mode 0640"):
        read_keys(path)


@pytest.mark.parametrize("text", [b"", b"public a\nsecret b\n", b"secret\npublic\n", b"\xff\xfe", b"public x"])
def test_what_is_no_key_is_refused(tmp_path: Path, text: bytes) -> None:
    path = key_file(tmp_path)
    write_keys(path, make_keys())
    path.write_bytes(text)
    with pytest.raises(UserError, match="does not hold a key pair — copy it again"):
        read_keys(path)


def test_halves_of_different_pairs_are_refused(tmp_path: Path) -> None:
    one, other, path = make_keys(), make_keys(), key_file(tmp_path)
    write_keys(path, one)
    path.write_bytes(b"public %b\nsecret %b\n" % (one.public, other.secret))
    with pytest.raises(UserError, match="does not hold a key pair"):
        read_keys(path)


def test_two_hosts_on_one_machine_share_no_name(tmp_path: Path) -> None:
    """What one host's sweep of `distflow-<tag>-*` and of its socket folder removes is never another host's."""
    hosts = (0, 1, 10, 100)
    assert len({socket_dir(tmp_path, host) for host in hosts}) == len(hosts)
    for mine in hosts:
        for other in hosts:
            segment = f"distflow-{run_tag(tmp_path, other)}-policy-t0-1"
            assert segment.startswith(f"distflow-{run_tag(tmp_path, mine)}-") == (mine == other)
            inside = worker_address(tmp_path, "rollout/0", other).startswith(f"ipc://{socket_dir(tmp_path, mine)}/")
            assert inside == (mine == other)
    assert socket_dir(tmp_path) == socket_dir(tmp_path, 0)
    assert ".h" not in run_tag(tmp_path)
