"""WebShop: its task, pages and reward over a catalogue that ships, or over its own files.

`catalogue` holds products and goals, `search` finds products, `pages` leads from page to page,
`reward` judges a purchase, `expert` knows the way, `env` is the environment; `load` reads WebShop's
files, `make` made what ships.
"""
