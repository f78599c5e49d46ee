"""Bring your own agent: an OpenAI-compatible endpoint for agents that we did not write.

agents.py    runs a ticket's members as agents, each with a base URL of its own
server.py    HTTP on the loopback interface
asked.py     a request, decoded strictly; reply.py: an answer, as JSON or as events
template.py  messages and tools → tokens; tools.py: tool calls as text
session.py   one episode's calls: limits, generation, what becomes of them
recorder.py  calls → token streams, merged only on exact token prefix
judge.py     rewards the members of a group against each other
"""
