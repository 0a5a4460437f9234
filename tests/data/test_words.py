"""Words and hashes of their runs."""

import numpy as np

from attar.data.words import run_hashes, words


def test_words_of_scripts_with_and_without_spaces():
    assert words('It\'s 3.5, "Or" so_on!') == ["it", "s", "3", "5", "or", "so_on"]
    assert words("我们 go ไป") == ["我", "们", "go", "ไ", "ป"]


def test_a_run_has_one_hash_wherever_it_is():
    sequence = ["a", "b", "c", "d", "e", "f", "a", "b", "c"]
    hashes = run_hashes(sequence, 3)
    assert len(hashes) == 7
    assert hashes[0] == hashes[6]
    assert len(np.unique(hashes)) == 6
    assert run_hashes(sequence, 3)[1] != run_hashes(["c", "b", "d"], 3)[0]  # order counts
    assert run_hashes(["a", "b"], 3).tolist() == run_hashes(["a", "b"], 2).tolist()
    assert len(run_hashes([], 3)) == 0
