"""Copies of the metadata: the image at a version, the deltas that keep it current, and their followers.

Invariants: only its follower changes an image; versions only grow; a follower that is too far behind for deltas loads a
whole image.

May import: `tidelog.controller.machine`, `rpc`, `model`. Entry: `tidelog.controller.image.image.Image`,
`tidelog.controller.image.follower.ImageFollower`.
"""
