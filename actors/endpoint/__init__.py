"""OpenAI-compatible endpoint for the user's own agents.

runner.py       runs the members of a ticket as agents, each with a base URL of its own
outcome.py      imports an agent and reads its return value
external.py     episodes that agents elsewhere start and finish
conversations.py, conversations.html: people who use the policy, and their page
http_server.py  HTTP
request.py      decodes what all API forms share
chat_form.py, responses_form.py, messages_form.py: requests and answers of the three API forms
session.py      limits, generates and records the calls of one episode
template.py     messages and tools → tokens
tools.py        tool calls ↔ text
recorder.py     calls → token streams, merged only on an exact token prefix
group_judge.py  scores the members of a group relative to each other
"""
