//! Decoded instructions.
//!
//! Operands are indices of register rows. Immediates and special registers also have rows, which hold their value when
//! a warp begins, so instructions need not distinguish kinds of operands.

/// Index of a row in its register file: predicates, words or longs.
pub type Row = u32;

/// An instruction with its guard predicate.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// The operation.
    pub op: Op,
    /// Predicate row, and whether it is negated.
    pub guard: Option<(Row, bool)>,
}

/// Arithmetic on two words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word2 {
    Add,
    Sub,
    Mul,
    MulHi,
    MulHiSigned,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    ShrSigned,
    Min,
    MinSigned,
    Max,
    MaxSigned,
    Div,
    DivSigned,
    Rem,
    RemSigned,
    FAdd,
    FSub,
    FMul,
    FMin,
    FMax,
    FMaxBf16s,
    FMaxF16s,
    FMulF16s,
    FDiv,
    Shl16,
    Shr16,
    Add16,
    Sub16,
    Mul16,
    PackE4m3,
    PackE5m2,
    PackBf16,
    PackF16,
}

/// Arithmetic on one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word1 {
    Move,
    Not,
    Neg,
    FNeg,
    FAbs,
    Popc,
    Clz,
    Ex2,
    Lg2,
    Rcp,
    RcpNearest,
    Rsqrt,
    Sqrt,
    Tanh,
    Sin,
    Cos,
    Low16,
    SignExtend16,
    F32FromU32,
    F32FromI32,
    U32FromF32,
    I32FromF32,
    F32FromF16,
    UnpackE4m3,
    UnpackE5m2,
    BrevBits,
}

/// How a word becomes a pair of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Widen {
    Unsigned,
    Signed,
    U64FromF32,
    I64FromF32,
}

/// Arithmetic on three words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word3 {
    Mad,
    Mad16,
    Fma,
    FmaF16s,
    Bfe,
    BfeSigned,
    PermuteBytes,
}

/// Arithmetic on two longs; shifts take a word as the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Long2 {
    Add,
    Sub,
    Mul,
    MulHigh,
    And,
    Or,
    Xor,
    Min,
    MinSigned,
    Max,
    MaxSigned,
    Div,
    DivSigned,
    Rem,
    RemSigned,
}

/// Shifts of a long by a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shift {
    Left,
    Right,
    RightSigned,
}

/// How two values are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// True if the values are comparable.
    Always,
    /// True if they are not.
    Never,
}

/// The type of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Unsigned,
    Signed,
    /// False if either value is NaN.
    Float,
    /// True if either value is NaN.
    FloatOrNan,
}

/// Logic on predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bit2 {
    And,
    Or,
    Xor,
}

/// The memory space of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Generic,
    Global,
    Shared,
    /// Shared memory of a block in the cluster.
    Cluster,
    Param,
}

/// Memory ordering of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Not atomic.
    Weak,
    /// Atomic, without ordering.
    Relaxed,
    Acquire,
    Release,
    AcqRel,
}

/// The threads to which an ordering applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Cta,
    Gpu,
}

/// An address: a word or long row, and an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub row: Row,
    pub long: bool,
    pub offset: i64,
}

/// Operation of an atomic instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    Add,
    FAdd,
    Min,
    MinSigned,
    Max,
    MaxSigned,
    And,
    Or,
    Xor,
    Exchange,
    Increment,
    CompareExchange,
}

/// Source lane of a shuffle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    Idx,
    Up,
    Down,
    Bfly,
}

/// Result of a vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    Any,
    All,
    Uniform,
}

/// Operation of a reduction over lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    Add,
    Min,
    MinSigned,
    Max,
    MaxSigned,
    And,
    Or,
    Xor,
}

/// Element type of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F16,
    Bf16,
    /// Only in [`Wgmma`].
    E4m3,
}

impl Element {
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }
}

/// Operand A of `wgmma`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperandA {
    /// Descriptor, and whether it is M-major.
    Shared(Row, bool),
    Registers([Row; 4]),
}

/// A matrix product of a warpgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wgmma {
    pub element: Element,
    pub n: u32,
    pub d: Box<[Row]>,
    pub a: OperandA,
    pub b: Row,
    /// Whether B is N-major.
    pub transposed_b: bool,
    pub add: Add,
}

/// Whether a product adds to the accumulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Add {
    Always,
    Never,
    If(Row),
}

/// A box of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorBox {
    pub map: Row,
    pub coordinates: Box<[Row]>,
}

/// The operation of an instruction. `d` is written, the other operands are read.
#[derive(Clone, Debug)]
pub enum Op {
    Word1 {
        f: Word1,
        d: Row,
        a: Row,
    },
    Word2 {
        f: Word2,
        d: Row,
        a: Row,
        b: Row,
    },
    Word3 {
        f: Word3,
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    MoveLong {
        d: Row,
        a: Row,
    },
    Long2 {
        f: Long2,
        d: Row,
        a: Row,
        b: Row,
    },
    ShiftLong {
        f: Shift,
        d: Row,
        a: Row,
        b: Row,
    },
    MadLong {
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    BfeLong {
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    NegLong {
        d: Row,
        a: Row,
    },
    NotLong {
        d: Row,
        a: Row,
    },
    /// Long = word × word, or × word + long.
    MulWide {
        signed: bool,
        d: Row,
        a: Row,
        b: Row,
        c: Option<Row>,
    },
    /// Word = 16 bits × 16 bits.
    MulWide16 {
        d: Row,
        a: Row,
        b: Row,
    },
    LongFromWord {
        f: Widen,
        d: Row,
        a: Row,
    },
    WordFromLong {
        d: Row,
        a: Row,
    },
    /// Either half may be ignored.
    UnpackLong {
        low: Option<Row>,
        high: Option<Row>,
        a: Row,
    },
    PackLong {
        d: Row,
        low: Row,
        high: Row,
    },
    UnpackWord {
        low: Option<Row>,
        high: Option<Row>,
        a: Row,
    },
    PackWord {
        d: Row,
        low: Row,
        high: Row,
    },
    SetWord {
        compare: Compare,
        kind: Kind,
        p: Row,
        a: Row,
        b: Row,
    },
    SetLong {
        compare: Compare,
        signed: bool,
        p: Row,
        a: Row,
        b: Row,
    },
    SelectWord {
        d: Row,
        a: Row,
        b: Row,
        p: Row,
    },
    SelectLong {
        d: Row,
        a: Row,
        b: Row,
        p: Row,
    },
    MoveBit {
        d: Row,
        a: Row,
    },
    NotBit {
        d: Row,
        a: Row,
    },
    Bit2 {
        f: Bit2,
        d: Row,
        a: Row,
        b: Row,
    },

    Load {
        space: Space,
        order: Order,
        scope: Scope,
        bytes: u8,
        long: bool,
        /// `.nc`: the data is not written while the kernel runs.
        read_only: bool,
        d: Box<[Row]>,
        address: Address,
    },
    Store {
        space: Space,
        order: Order,
        scope: Scope,
        bytes: u8,
        long: bool,
        values: Box<[Row]>,
        address: Address,
    },
    Atomic {
        f: Atomic,
        space: Space,
        order: Order,
        scope: Scope,
        long: bool,
        d: Option<Row>,
        address: Address,
        b: Row,
        c: Row,
    },
    /// Long address = start of the space's window + offset.
    ToGeneric {
        space: Space,
        d: Row,
        a: Row,
    },
    FromGeneric {
        space: Space,
        d: Row,
        a: Row,
    },
    Prefetch,
    /// Maps a block's own address to that address in the block with a rank, in the cluster's window.
    MapRank {
        d: Row,
        a: Row,
        rank: Row,
    },

    Branch {
        target: u32,
    },
    BranchTable {
        index: Row,
        targets: Box<[u32]>,
    },
    Exit,
    Trap {
        what: Box<str>,
    },

    Shuffle {
        f: Shuffle,
        d: Row,
        valid: Option<Row>,
        a: Row,
        b: Row,
        c: Row,
        mask: Row,
    },
    Vote {
        f: Vote,
        d: Row,
        a: Row,
        negated: bool,
        mask: Row,
    },
    Ballot {
        d: Row,
        a: Row,
        negated: bool,
        mask: Row,
    },
    Reduce {
        f: Reduce,
        d: Row,
        a: Row,
        mask: Row,
    },
    Elect {
        d: Option<Row>,
        p: Row,
        mask: Row,
    },
    ActiveMask {
        d: Row,
    },
    MatchAny {
        d: Row,
        a: Row,
        mask: Row,
    },
    SyncWarp {
        mask: Row,
    },
    Clock {
        d: Row,
        long: bool,
    },
    Smid {
        d: Row,
    },
    Nanosleep,

    Mma {
        element: Element,
        d: [Row; 4],
        a: [Row; 4],
        b: [Row; 2],
        c: [Row; 4],
    },
    Mma8 {
        element: Element,
        d: [Row; 4],
        a: [Row; 2],
        b: Row,
        c: [Row; 4],
    },
    LoadMatrix {
        transposed: bool,
        d: Box<[Row]>,
        address: Address,
    },
    StoreMatrix {
        transposed: bool,
        values: Box<[Row]>,
        address: Address,
    },
    MoveMatrix {
        d: Row,
        a: Row,
    },
    Wgmma(Box<Wgmma>),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait {
        pending: u32,
    },

    /// `count` none: all threads of the block. `vote`: the result and the predicate; it is the or of all predicates.
    Barrier {
        id: Row,
        count: Option<Row>,
        arrive_only: bool,
        aligned: bool,
        vote: Option<(Row, Row)>,
    },
    /// Arrival at the barrier of the cluster.
    ClusterArrive {
        releases: bool,
    },
    ClusterWait,
    Fence,
    FenceProxyAsync {
        shared: bool,
        global: bool,
    },
    FenceBarrierInit,
    SetMaxRegisters {
        registers: u32,
        increase: bool,
    },
    GridWait,
    GridLaunch,

    BarrierInit {
        address: Address,
        count: Row,
    },
    BarrierInvalidate {
        address: Address,
    },
    BarrierArrive {
        address: Address,
        count: Option<Row>,
        bytes: Option<Row>,
        state: Option<Row>,
    },
    BarrierExpect {
        address: Address,
        bytes: Row,
    },
    BarrierTest {
        p: Row,
        address: Address,
        parity: Row,
        may_sleep: bool,
    },

    CopyAsync {
        target: Address,
        source: Address,
        bytes: u32,
        valid: Option<Row>,
    },
    CopyAsyncCommit,
    CopyAsyncWait {
        pending: u32,
        all: bool,
    },
    CopyAsyncArrive {
        address: Address,
    },
    /// Stores eight bytes, then counts them at an mbarrier; both may be in another block of the cluster.
    StoreAsync {
        address: Address,
        value: Row,
        barrier: Address,
    },
    BulkLoad {
        target: Address,
        source: Address,
        bytes: Row,
        barrier: Address,
    },
    BulkStore {
        target: Address,
        source: Address,
        bytes: Row,
        add_f32: bool,
    },
    TensorLoad {
        target: Address,
        tensor: TensorBox,
        barrier: Address,
    },
    TensorStore {
        tensor: TensorBox,
        source: Address,
        add: bool,
    },
    BulkCommit,
    BulkWait {
        pending: u32,
        read: bool,
    },
}
