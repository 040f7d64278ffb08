"""Names on the wire that clients and strategies share; those of one payload are in its file."""

WEIGHTS = "weights"  # what clients of Flower's own strategies reply with

# metrics of replies
TRAIN_LOSS = "train-loss"
LOSSES = "losses"  # of candidates
LOST_STATE = "lost-state"  # 1: what only the client had; 0: what the server can send again
EFFECTIVE_STEPS = "effective-steps"  # of a client, or of all
EXAMPLES_CHANGED = "examples-changed"
DIVERGED = "diverged"
RATE_TIMES_LAMBDA = "rate-times-lambda"

PROXIMAL_MU = "proximal-mu"  # configuration of local SGD

# configuration: what a client keeps from round to round
RUN = "personal-run"
ROUND = "personal-round"  # whose arrays count

# configuration: an exchange between neighbours
NEIGHBOURS = "neighbours"
DEGREES = "degrees"  # how many neighbours each of them has
STEP = "step"
BATCH = "batch"
OUTLIER_FACTOR = "outlier-factor"
MAX_EXAMPLES = "max-examples"
KEEP_BOTH = "keep-both"  # the weights before the last thing done in a round as well
HUB = "hub"  # whether the client is one; missing without hubs

# configuration: sealed parcels
PARCEL_RUN = "parcel-run"
PARCEL_EXCHANGE = "parcel-exchange"
PARCEL_SENDER = "parcel-sender"
PARCEL_OWN_KEY = "parcel-own-key"
PARCEL_RECEIVERS = "parcel-receivers"
PARCEL_KEYS = "parcel-keys"
PARCEL_VOUCHERS = "parcel-vouchers"
OF_NEIGHBOURS = frozenset(
    {
        *(RUN, ROUND, NEIGHBOURS, STEP, BATCH, OUTLIER_FACTOR, MAX_EXAMPLES, KEEP_BOTH),
        *(PARCEL_RUN, PARCEL_EXCHANGE, PARCEL_SENDER, PARCEL_OWN_KEY),
        *(PARCEL_RECEIVERS, PARCEL_KEYS, PARCEL_VOUCHERS),
    }
)

# records
PERSONAL = "personal"  # first values of what a client keeps
CORRECTIONS, CONTROLS = "corrections", "controls"  # of SCAFFOLD
PROXIMAL_CENTRE = "proximal-centre"  # in place of the received weights
PROTOTYPES = "prototypes"
BEFORE = "before"  # weights: see KEEP_BOTH
STEPS, CLASS_WEIGHTS = "steps", "class-weights"  # by which features are rounded and weighted
TOTAL = "total"  # of all clients' sums
NETWORK, NORMALISER, LINEAR, CONTROL = "network", "normaliser", "linear", "control"  # of TCT
SECURE_SUM = "secure-sum"

# arrays of a secure sum
PUBLIC_KEY, NONCE = "public-key", "nonce"
CLIENTS, KEYS, VOUCHERS, NONCES, THRESHOLD = "clients", "keys", "vouchers", "nonces", "threshold"
EXCHANGE, WORD_BYTES, MASKED = "exchange", "word-bytes", "masked"  # words
PROMISE, PARCELS, TAGS, SHARES = "promise", "parcels", "tags", "shares"

# other arrays
COUNTS = "counts"  # of the examples of each class
SEALED = "sealed"
