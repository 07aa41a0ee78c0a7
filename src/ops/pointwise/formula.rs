//! Macros that make an operator of a row of the table: one formula for the CPU's loops and for CUDA, and the record around it.
//!
//! A formula's tokens are Rust as they stand, in the words of [`words`](super::words); the same tokens as text are C++, where
//! `kernels/pointwise.cuh` defines the same words. `of(0.5)` is a constant in the type that is computed in.

/// Defines functions that several formulas use, in both languages.
macro_rules! functions {
    (
        constants { $($(#[$const_doc:meta])* $const:ident = $number:expr;)* }
        $($(#[$doc:meta])* fn $name:ident($($x:ident),+) $([$($v:ident = $e:expr),+])? = $value:expr;)*
    ) => {
        $($(#[$const_doc])* pub(super) const $const: f64 = $number;)*
        $(
            $(#[$doc])*
            #[inline(always)]
            pub(super) fn $name<A: Real>($($x: A),+) -> A {
                $($(let $v = $e;)+)?
                $value
            }
        )*
        /// Their operations.
        pub(super) const FUNCTION_FLOPS: Known =
            &[$((stringify!($name), flops!([$($($e),+)?], $value, &[]))),*];
        /// The same in CUDA.
        pub(super) const FUNCTIONS: &str = concat!(
            "#include \"pointwise.cuh\"\nstruct Functions : Words {\n",
            $("static constexpr f64 ", stringify!($const), " = ", stringify!($number), ";\n",)*
            $(cuda_function!(stringify!($name), "", ($($x),+), [$($($v = $e),+)?], $value),)*
            "};\n"
        );
    };
}

/// A member function of this name in CUDA.
macro_rules! cuda_function {
    ($name:expr, $more:literal, ($first:ident $(, $x:ident)*), [$($v:ident = $e:expr),*], $value:expr) => {
        concat!(
            "template <class A> static DEVICE auto ", $name, "(", $more, "A ", stringify!($first),
            $(", A ", stringify!($x),)*
            ") {\n  [[maybe_unused]] const auto of = [](f64 c) { return A(c); };\n",
            $("  const auto ", stringify!($v), " = ", stringify!($e), ";\n",)*
            "  return ", stringify!($value), ";\n}\n"
        )
    };
}

/// The operations of a formula.
macro_rules! flops {
    ([$($e:expr),*], $value:expr, $known:expr) => {
        operations(concat!($(stringify!($e), "\n",)* stringify!($value)), $known)
    };
}

macro_rules! arity {
    ($x:ident) => {
        1
    };
    ($x:ident, $y:ident) => {
        2
    };
    ($x:ident, $y:ident, $z:ident) => {
        3
    };
}

/// Gives a type the loops of a formula (`LOOPS`) and its CUDA kernels (`FORMULA`).
macro_rules! function {
    (
        $Type:ident $name:ident: $class:ident,
        ($($x:ident),+) ($($s:ident)?) [$($v:ident = $e:expr),*] $value:expr
    ) => {
        function!(@loops $Type $class, ($($x),+) ($($s)?) [$($v = $e),*] $value);

        impl $Type {
            /// The formula's operations.
            pub(super) const FLOPS: u64 = flops!([$($e),*], $value, FUNCTION_FLOPS);

            /// The formula's CUDA kernels.
            pub(super) const FORMULA: cuda::FormulaKernels = cuda::formula!(
                in cuda::KernelSource {
                    name: stringify!($name),
                    parts: &[
                        FUNCTIONS,
                        concat!(
                            "struct ", stringify!($name), "_formula : Functions {\n",
                            function!(@cuda ($($s)?) ($($x),+), [$($v = $e),*], $value),
                            "};\n",
                            function!(@each $class),
                            "(ALIKE_", arity!($($x),+), ", ", stringify!($name), ")\n"
                        ),
                    ],
                },
                stringify!($name)
            );
        }
    };
    (@loops $Type:ident floats, ($($x:ident),+) ($($s:ident)?) [$($v:ident = $e:expr),*] $value:expr) => {
        impl Function<{ arity!($($x),+) }> for $Type {
            #[inline(always)]
            fn at<A: Real>(_s: f64, [$($x),+]: [A; arity!($($x),+)]) -> A {
                $(let $s = _s;)?
                $(let $v = $e;)*
                $value
            }
        }

        impl $Type {
            /// The formula's loops.
            pub(super) const LOOPS: Loops = Loops::floats::<$Type, { arity!($($x),+) }>();
        }
    };
    (@loops $Type:ident numbers, ($($x:ident),+) () [$($v:ident = $e:expr),*] $value:expr) => {
        impl NumFunction<{ arity!($($x),+) }> for $Type {
            #[inline(always)]
            fn at<A: Num>(_: f64, [$($x),+]: [A; arity!($($x),+)]) -> A {
                $(let $v = $e;)*
                $value
            }
        }

        impl $Type {
            /// The formula's loops.
            pub(super) const LOOPS: Loops = Loops::numbers::<$Type, { arity!($($x),+) }>();
        }
    };
    (@cuda () ($($x:ident),+), [$($v:ident = $e:expr),*], $value:expr) => {
        cuda_function!("at", "f64, f64, ", ($($x),+), [$($v = $e),*], $value)
    };
    (@cuda ($s:ident) ($($x:ident),+), [$($v:ident = $e:expr),*], $value:expr) => {
        concat!(
            "template <class A> static DEVICE auto at(f64 ", stringify!($s), ", f64, A x) {\n",
            "  [[maybe_unused]] const auto of = [](f64 c) { return A(c); };\n",
            $("  const auto ", stringify!($v), " = ", stringify!($e), ";\n",)*
            "  return ", stringify!($value), ";\n}\n"
        )
    };
    (@each floats) => {
        "EACH_FLOAT"
    };
    (@each numbers) => {
        "EACH_NUMBER"
    };
}

/// Makes the operators of the table: for each row a type, its [`Pointwise`](super::Pointwise) record and samples.
macro_rules! records {
    ($(
        $(#[$doc:meta])*
        $Type:ident $name:ident($($x:ident),+ $(; $s:ident)?) $(as $verb:literal)?
            $([$($v:ident = $e:expr),+])? = $value:expr,
        for $class:ident, $algebra:ident $why:literal $(and |$ins:ident $(, $constant:ident)?| $rows:expr)?,
        gradient |$d:ident, $out:ident| { $($of:ident => $g:tt),+ },
        samples [$($($fill:ident)+),*] $(rounded $rounded:literal)? $(rough [$($($rough:ident)+),*])?;
    )*) => {
        $(
            record_type!(
                $(#[$doc])*
                #[doc = ""]
                #[doc = concat!("Operands in parts: ", stringify!($algebra), ". ", $why)]
                $Type $($s)?
            );
            function!($Type $name: $class, ($($x),+) ($($s)?) [$($($v = $e),+)?] $value);

            impl Pointwise for $Type {
                const NAME: &'static str = verb!($name $($verb)?);
                const ARITY: usize = arity!($($x),+);

                fn algebra(&self) -> Algebra {
                    Algebra::$algebra
                }

                fn dtype(&self, ins: &[Meta]) -> Result<DType> {
                    $class(Self::NAME, ins)
                }

                fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
                    cpu::compute(Self::NAME, &Self::LOOPS, constant!(self $($s)?), ins)
                }

                fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
                    cuda::map(Self::FORMULA, ins, &[constant!(self $($s)?)])
                }

                fn flops(&self) -> u64 {
                    Self::FLOPS
                }

                #[allow(unused_variables)]
                fn derivative(&self, g: &mut Vjp) -> Result<()> {
                    let terms = Terms::new(g);
                    let [$($x),+] = terms.operands();
                    let ($d, $out) = (terms.grad(), terms.output());
                    $(let $s = self.$s.0;)?
                    $(gradient!(terms, $of, $g);)+
                    terms.finish()
                }

                $(#[allow(unused_variables)]
                fn more_rows(&self, $ins: &[Meta]) -> Vec<Row> {
                    $(let $constant = self.$constant.0;)?
                    $rows
                })?
            }
        )*

        /// The samples of every row.
        fn row_samples() -> Vec<Sample> {
            let mut all = Vec::new();
            $(
                let op = sample_of!($Type $($s)?);
                let smooth: &[&[Fill]] = &[$(&[$(Fill::$fill),+]),*];
                let rough: &[&[Fill]] = &[$($(&[$(Fill::$rough),+]),*)?];
                let rounded: &[usize] = &[$($rounded)?];
                let class = stringify!($class);
                add_samples(&mut all, &op, smooth, rough, rounded.first().copied().unwrap_or(0), class);
            )*
            all
        }

        /// The operator of every row; of one with a constant, several.
        fn row_operators() -> Vec<Arc<dyn Op>> {
            let mut all: Vec<Arc<dyn Op>> = Vec::new();
            $(all.extend(sample_of!($Type $($s)?).map(|op| Arc::new(op) as Arc<dyn Op>));)*
            all
        }

        /// The CUDA sources of every row.
        const ROW_SOURCES: &[cuda::KernelSource] = &[$($Type::FORMULA.source),*];
    };
}

/// A row's type, with its constant if it has one.
macro_rules! record_type {
    ($(#[$doc:meta])* $Type:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $Type;
    };
    ($(#[$doc:meta])* $Type:ident $s:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $Type {
            /// The constant.
            pub $s: Bits,
        }

        impl $Type {
            /// The operator with this constant.
            pub fn by($s: f64) -> $Type {
                $Type { $s: Bits($s) }
            }
        }
    };
}

/// The operator's name: the method's, unless the row gives another.
macro_rules! verb {
    ($name:ident) => {
        stringify!($name)
    };
    ($name:ident $verb:literal) => {
        $verb
    };
}

macro_rules! constant {
    ($self:ident) => {
        0.0
    };
    ($self:ident $s:ident) => {
        $self.$s.0
    };
}

/// The operators of a row's samples: of a constant, several.
macro_rules! sample_of {
    ($Type:ident) => {
        [$Type]
    };
    ($Type:ident $s:ident) => {
        [1.5, -3.0, 2.0, -1.0, 1.0 / 3.0, -3e300, f64::NAN].map($Type::by)
    };
}

/// An operand's gradient, or the reason why it has none.
macro_rules! gradient {
    ($terms:ident, $of:ident, ($value:expr)) => {
        if $terms.needs($of) {
            let gradient = $value;
            $terms.set($of, gradient);
        }
    };
    ($terms:ident, $of:ident, $why:literal) => {
        $terms.none($of, $why);
    };
}

/// Hands on the rows' signatures: documentation, type, method, operands, constant.
macro_rules! signatures {
    ($then:ident: $(
        $(#[$doc:meta])*
        $Type:ident $name:ident($($x:ident),+ $(; $s:ident)?) $(as $verb:literal)?
            $([$($given:tt)*])? = $value:expr,
        for $class:ident, $algebra:ident $why:literal $(and |$($ins:ident),+| $rows:expr)?,
        gradient |$d:ident, $out:ident| { $($of:ident => $g:tt),+ },
        samples [$($smooth:tt)*] $(rounded $rounded:literal)? $(rough [$($rough:tt)*])?;
    )*) => {
        $then! { $([$(#[$doc])*] $Type $name($($x),+) ($($s)?);)* }
    };
}
pub(crate) use signatures;
