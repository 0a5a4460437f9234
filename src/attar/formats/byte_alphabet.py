"""GPT-2's byte alphabet: the 256 printable characters in which a byte-level BPE writes bytes."""

PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_alphabet() -> dict[int, str]:
    """The character of each byte: printable ones are themselves, the others are U+0100 and on."""
    others = (byte for byte in range(256) if byte not in PRINTABLE)
    return {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_ALPHABET = byte_alphabet()
