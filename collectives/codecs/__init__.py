"""Formats of encoded values, one file a family. Lowest first; nothing here is imported for you,
`accuracy` and `mixtures` need no torch:

accuracy    which codecs make a wished error
ranges      which elements of a flat vector have which codec, read from text
mixtures    which they are to have, and the text
wire        Codec, Wire: the seam, and typed views of encoded bytes
kernels     the arithmetic: pure torch, `out=`, the same bits everywhere
native      most of the arithmetic compiled (native.c), where there was a compiler
floats      values in a floating-point format
blocks      integers with a scale a block of values
levels      two levels a block, and what such records have in common
sparse      the largest values of each tile
bits        words that nobody calculates with
mixed       pieces of several codecs in one chunk
codec       a chunk of float32 values and its wire bytes, by the codec's name; the chunking of a
            vector's chunks
device      such a vector encoded and decoded where its values lie
encoded     a whole vector of such chunks
vanished    which share of a vector's values a codec makes 0
"""
