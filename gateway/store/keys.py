"""Names in the store, and the one script. Everything carries a time to live, counted by the store's own clock (G8).

    firsttoken:1:entry:{ID}      hash: `record`, the entry as it runs; `end`, the entry as it ended, written once
    firsttoken:1:data:{ID}       string: the bytes of the answer so far
    firsttoken:1:same:PRINT      string: id of the last entry with that fingerprint
    firsttoken:1:lease:REPLICA   string: there while that process lives
    firsttoken:1:mark:REPLICA    string: a number that grows; an older one shows that the store forgot something
    firsttoken:1:cancels:REPLICA set: ids that somebody wants stopped, for when the message got lost
    channels firsttoken:1:changed:ID and firsttoken:1:cancel:REPLICA

The number in the prefix is the version of all this: another form gets another number, and never meets the old one.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "firsttoken:1:"

GONE: Final = -1  # the script's reply: something that was written before is not there any more
ENDED: Final = -2  # the script's reply: there is a terminal state already

# Writes one entry's news in one step. Safe to send twice: what is there already is not appended again, so a write
# whose reply was lost is simply repeated. Sent whole each time (EVAL): a server that was flushed knows no digest (G6)
# and some proxies refuse SCRIPT LOAD (C120).
# KEYS: entry, data. ARGV: record or "", offset, chunk, end or "", time to live in ms, channel, "1" to start afresh.
WRITE: Final = """
local function is(key, kind)
  local found = redis.call('TYPE', key).ok
  return found == kind or found == 'none'
end
if not is(KEYS[1], 'hash') then redis.call('DEL', KEYS[1]) end
if not is(KEYS[2], 'string') then redis.call('DEL', KEYS[2]) end
if redis.call('HEXISTS', KEYS[1], 'end') == 1 then return -2 end
if ARGV[7] == '1' then redis.call('DEL', KEYS[1], KEYS[2]) end
local size, offset, chunk = redis.call('STRLEN', KEYS[2]), tonumber(ARGV[2]), ARGV[3]
if size < offset then return -1 end
if ARGV[1] ~= '' then redis.call('HSET', KEYS[1], 'record', ARGV[1])
elseif redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
if size - offset < #chunk then redis.call('APPEND', KEYS[2], string.sub(chunk, size - offset + 1)) end
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'end', ARGV[4]) end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('PUBLISH', ARGV[6], '')
return offset + #chunk
"""


def entry_key(entry_id: str) -> str:
    """The hash of an entry. Braces keep both keys of an entry in one slot of a cluster."""
    return f"{PREFIX}entry:{{{entry_id}}}"


def data_key(entry_id: str) -> str:
    """The bytes of an entry's answer."""
    return f"{PREFIX}data:{{{entry_id}}}"


def same_key(fingerprint: str) -> str:
    """The last entry with a fingerprint."""
    return f"{PREFIX}same:{fingerprint}"


def lease_key(replica: str) -> str:
    """The lease of a process."""
    return f"{PREFIX}lease:{replica}"


def mark_key(replica: str) -> str:
    """The growing number of a process."""
    return f"{PREFIX}mark:{replica}"


def cancels_key(replica: str) -> str:
    """Cancel requests for a process."""
    return f"{PREFIX}cancels:{replica}"


def changed_channel(entry_id: str) -> str:
    """Where news about an entry are announced."""
    return f"{PREFIX}changed:{entry_id}"


def cancel_channel(replica: str) -> str:
    """Where a process hears which of its entries to stop."""
    return f"{PREFIX}cancel:{replica}"
