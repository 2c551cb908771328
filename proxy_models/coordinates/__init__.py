"""The coordinate check: does every activation move by the same amount at every width and depth?"""
