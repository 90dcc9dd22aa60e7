# SPDX-License-Identifier: Apache-2.0
# Makes the comments of the C header such as Doxygen reads: two stars, and '<' where one follows what it explains.
s|^/\* This header|/** @file\n * This header|
s|^/\* The _init functions|/** @file\n * The _init functions|
/SPDX/!s|^\( *\)/\* |\1/** |
s|^\( *[^ /*].*[^ ]\) */\* |\1 /**< |
