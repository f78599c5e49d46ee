"""The interface of every weight channel, and the parts that all channels share."""
