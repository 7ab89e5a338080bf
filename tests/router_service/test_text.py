from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from forefetch.errors import BadRequest, UnsupportedModel
from router_service import detokenise
from router_service.text import Text

CORPUS = ["the router holds the trunk, héllo wörld 你好世界 🎉🎊 naïve café\n\ttabs  and   spaces"] * 3
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIALS)
    )
    # Added tokens whose characters are bytes' stand-ins, and ones whose are not.
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("é", "★ star", "plain", "Ġ")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentence_piece(decoder: Any) -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "a", "b", "▁a", "▁the", "é", "你", "▁▁", "b▁a", ",", "\n"]
    vocab = {token: i for i, token in enumerate(["<unk>", *SPECIALS, *byte_tokens, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.decoder = decoder
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "llama": lambda: sentence_piece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    ),
    "metaspace": lambda: sentence_piece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "metaspace-never": lambda: sentence_piece(
        decoders.Sequence([decoders.Metaspace(prepend_scheme="never"), decoders.ByteFallback()])
    ),
    "no-decoder": lambda: sentence_piece(None),
}


def save(folder: Path, tokenizer: Tokenizer, template: str | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Text, int]]:
    """Each tokenizer as Text, with ids a little beyond its vocabulary: models pad theirs."""
    found = {}
    for name, make in TOKENIZERS.items():
        tokenizer = make()
        found[name] = (Text(save(tmp_path_factory.mktemp(name), tokenizer)), tokenizer.get_vocab_size() + 3)
    return found


def streamed(text: Text, ids: list[int], stops: list[str]) -> tuple[list[str], str | None]:
    stream = text.stream(stops)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped is not None:
            assert stream.push(token) == "" == stream.finish()
            return pieces, stream.stopped
    pieces.append(stream.finish())
    return pieces, stream.stopped


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200)
@given(data=st.data())
def test_the_pieces_add_up_to_decode(texts: dict[str, tuple[Text, int]], name: str, data: st.DataObject) -> None:
    text, size = texts[name]
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    pieces, stopped = streamed(text, ids, [])
    assert "".join(pieces) == text.decode(ids)
    assert stopped is None
    for piece in pieces:
        piece.encode("utf-8")  # no lone surrogate


@settings(max_examples=300)
@given(runs=st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=4).map(str.encode)), max_size=8))
def test_only_an_open_character_is_held_back(texts: dict[str, tuple[Text, int]], runs: list[bytes]) -> None:
    """One token per byte, broken and whole characters mixed."""
    text, _ = texts["byte-level"]
    stand_ins = {byte: char for char, byte in detokenise._BYTE_OF.items()}
    ids = [text._tokenizer.token_to_id(stand_ins[byte]) for byte in b"".join(runs)]
    stream = text.stream([])
    out = ""
    for count, token in enumerate(ids, start=1):
        out += stream.push(token)
        # Two bytes of a surrogate (ED A0) are open to Python's decoder, and two characters to the tokenizer's.
        assert text.decode(ids[:count]) in (out, out + "\ufffd", out + "\ufffd\ufffd")
    assert out + stream.finish() == text.decode(ids)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the shortest beginning of the text that ends in a stop string, without the longest that it ends in."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("name", ["byte-level", "llama"])
@settings(max_examples=300)
@given(data=st.data())
def test_stop_strings_are_exact_across_token_borders(
    texts: dict[str, tuple[Text, int]], name: str, data: st.DataObject
) -> None:
    text, size = texts[name]
    # Few distinct tokens, so that stop strings cut out of the text overlap themselves and each other.
    alphabet = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    ids = data.draw(st.lists(st.sampled_from(alphabet), max_size=30))
    whole = text.decode(ids)
    spans = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=4))
    stops = [stop for start, size in spans if (stop := whole[start : start + size])]
    stops += data.draw(st.lists(st.text(st.sampled_from("ab �"), min_size=1, max_size=4), max_size=2))
    pieces, stopped = streamed(text, ids, stops)
    assert ("".join(pieces), stopped) == expected(whole, stops)


@pytest.mark.parametrize(
    ("words", "stops", "pieces", "stopped"),
    [
        (["one ", "STOP", " two"], ["STOP"], ["one ", ""], "STOP"),
        (["one S", "TO", "P two"], ["STOP"], ["one ", "", ""], "STOP"),
        (["one S", "TO", "x two"], ["STOP"], ["one ", "", "STOx two", ""], None),
        (["one S", "TO"], ["STOP"], ["one ", "", "STO"], None),
        (["aab", "aab", "c"], ["aabaac"], ["", "aab", "aabc", ""], None),
        (["abcd"], ["bcd", "c"], ["ab"], "c"),  # "c" is complete first
        (["abc"], ["c", "bc"], ["a"], "bc"),  # both end here: the longer one began first
        (["ab", "c"], ["abc", "ab"], [""], "ab"),
    ],
)
def test_what_is_held_back(tmp_path: Path, words: list[str], stops: list[str], pieces: list[str], stopped: str | None) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(word, special=False) for word in words])
    text = Text(save(tmp_path, tokenizer))
    ids = [text._tokenizer.token_to_id(word) for word in words]
    # Added tokens with a blank stand for their own text, the others are read as byte stand-ins: ASCII is the same in both.
    assert streamed(text, ids, stops) == (pieces, stopped)


def test_text_gets_the_tokenizers_special_tokens(texts: dict[str, tuple[Text, int]]) -> None:
    text, _ = texts["byte-level"]
    ids = text.encode("the router")
    assert ids[0] == 0
    assert text.decode(ids) == "the router"


TEMPLATES = {
    "chatml": """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "blocks": """{{ bos_token }}
{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
  {{ m | tojson }}{{ eos_token }}
{% endfor %}
{% if tools is none and documents is none %}<end>{% endif %}
""",
    "date": """{{ strftime_now('%Y') }}
{% set ns = namespace(n=0) %}
{% for m in messages %}
    {% set ns.n = ns.n + 1 %}
{% endfor %}
{{ ns.n }}""",
}


@pytest.mark.parametrize("where", ["file", "config", "named"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_equals_transformers(tmp_path: Path, name: str, where: str) -> None:
    config: dict[str, Any] = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    template = TEMPLATES[name]
    if where == "config":
        config["chat_template"] = template
    if where == "named":
        config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    folder = save(tmp_path, byte_level(), template if where == "file" else None, **config)
    theirs: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    messages = [("system", "be brief <b>"), ("user", "héllo 你好\n"), ("assistant", ""), ("user", "and <|im_end|> now?")]
    turns = [{"role": role, "content": content} for role, content in messages]
    got = Text(folder).chat(messages)
    assert got == theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def test_a_template_may_refuse_and_may_be_missing(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('roles must start with user') }}{% endif %}{{ messages[0].x.y }}"
    )
    text = Text(save(tmp_path / "a", byte_level(), template))
    with pytest.raises(BadRequest, match="roles must start with user"):
        text.chat([("system", "x")])
    with pytest.raises(BadRequest, match=r"chat\.messages: the chat template cannot render them"):
        text.chat([("user", "x")])
    with pytest.raises(BadRequest, match="no chat template"):
        Text(save(tmp_path / "b", byte_level())).chat([("user", "x")])


CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_turns_that_follow_are_what_the_template_writes_behind_the_answer(tmp_path: Path) -> None:
    text = Text(save(tmp_path, byte_level(), CHATML))
    end = text._tokenizer.token_to_id("<|im_end|>")
    following = [("user", "and then?")]
    expected = text.encode("<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n", special=False)
    assert text.chat_on(following, [5, 6]) == expected, "an answer that broke off gets its end"
    assert text.chat_on(following, [5, end]) == expected[1:], "one that ended has it already"
    # A whole conversation in one go is the same text, if the answer's tokens are those of its text.
    first, answer = [("user", "hello")], "a story"
    whole = text.chat([*first, ("assistant", answer), *following])
    told = [*text.chat(first), *text.encode(answer, special=False)]
    assert text.decode([*told, *text.chat_on(following, told)]) == text.decode(whole)


def test_a_template_that_hides_answers_cannot_go_on(tmp_path: Path) -> None:
    text = Text(
        save(tmp_path, byte_level(), "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    )
    with pytest.raises(BadRequest, match="chat"):
        text.chat_on([("user", "x")], [5])


def test_a_template_cannot_reach_the_process(tmp_path: Path) -> None:
    text = Text(save(tmp_path, byte_level(), "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"))
    with pytest.raises(BadRequest, match="cannot render"):
        text.chat([("user", "x")])


def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="chat template"):
        Text(save(tmp_path / "a", byte_level(), "{% if %}"))
    with pytest.raises(UnsupportedModel, match="decoder CTC"):
        Text(save(tmp_path / "b", sentence_piece(decoders.CTC())))
    strip_end = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(UnsupportedModel, match=r"Fuse \+ Strip"):
        Text(save(tmp_path / "c", sentence_piece(strip_end)))


def test_a_checkpoint_without_tokenizer_has_no_text(tmp_path: Path) -> None:
    assert Text.load(tmp_path) is None
    assert Text.load(save(tmp_path / "a", byte_level())) is not None
