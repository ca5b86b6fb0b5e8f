"""The records between front and engine travel as MessagePack and stay small."""

import msgspec

from meshwright.endpoint.seam import EngineFigures, Generated, Prompted, Sampling, TokenScore


def there_and_back(value):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def test_records_come_back_from_messagepack_as_they_were():
    sampling = Sampling(temperature=0.5, seed=7, stop_ids=(2,), logprobs=0)
    asked = Prompted(number=3, prompt=(5, 6, 7), limit=9, sampling=sampling, answered=1, adapter="a", deadline_s=0.5)
    piece = Generated(number=3, tokens=(8,), scores=(TokenScore(-0.5, ((8, -0.5), (9, -1.5))),), finish="length")
    first = Generated(number=3, cached=2, prompt_scores=(None, TokenScore(-1.0)))
    for value in (asked, piece, first, EngineFigures(running=1, busy_s=0.25)):
        assert there_and_back(value) == value


def test_a_piece_of_one_token_takes_less_than_forty_bytes():
    assert len(msgspec.msgpack.encode(Generated(number=123_456, tokens=(31_999,)))) < 40  # two names and two numbers
