"""Losses of sampled text: a student learns from the tokens that it drew itself. One file each.

A method is a pair: ``terms`` turns the log-probabilities of whole rows into a few numbers for each drawn
token, and ``loss_and_grad`` is an objective of a chunk of logits with these numbers
(``objectives/chunked.py``).
"""

from attar.distillation.policy import minillm, policy_gradient

POLICIES = {"policy-gradient": policy_gradient, "minillm": minillm}
