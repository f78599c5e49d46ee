"""Self-Attributing: which turns of a finished episode helped.

judge    who is asked, and what becomes of the answer: labels, or none and the reason
prompt   how an episode is put to a language model
labels   labels out of an answer, or out of the environment's scores
own      the policy itself as that language model
"""
