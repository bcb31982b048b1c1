{{/* What names begin with. Helm allows releases names that Services must not have. */}}
{{- define "quire.name" -}}
{{- $wrong := "release %q: Services are named after it, so it must begin with a letter and have no dot" }}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) }}{{ fail (printf $wrong .Release.Name) }}{{ end }}
{{- regexReplaceAll "-+$" (trunc 40 .Release.Name) "" }}
{{- end }}

{{/* Labels of a component: (list $ "gateway"). They select, so they never change. */}}
{{- define "quire.selector" -}}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/part-of: quire
app.kubernetes.io/name: quire
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
{{- end }}

{{/* The label of a StatefulSet for one role, whose values have replica.role; none without roles. */}}
{{- define "quire.roleLabel" -}}
{{- with .Values.replica.role }}quire.dev/role: {{ . }}{{ end }}
{{- end }}

{{- define "quire.replicaLabels" -}}
{{ include "quire.labels" (list . "replica") }}
{{ include "quire.roleLabel" . }}
{{- end }}

{{/* A value as text. Helm has numbers as floats, and writes large ones as 1e+06. */}}
{{- define "quire.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}{{ else }}{{ toString . }}{{ end }}
{{- end }}

{{/* Seconds in which requests end, --drain-timeout of gateways and schedulers. */}}
{{- define "quire.drain" -}}
{{ .Values.settings.QUIRE_DRAIN_TIMEOUT | default 30 | float64 | ceil | int }}
{{- end }}

{{/* The variables of all services. Pods have its checksum, so that they are made anew when it changes. */}}
{{- define "quire.settings" -}}
{{- $secret := "a ConfigMap shows it to many; name a Secret by model.tokenSecret or settingsSecret" }}
{{- $own := "the chart sets it, and would override this without a word; see the other values" }}
{{- $flags := list "MODEL" "DEVICE" "LISTEN" "WORKERS" "SCHEDULERS" "TLS_DIR" "LOCAL_SOCKET" "KEYS_FILE" }}
{{- $more := list "OPEN_METRICS" "(GRPC|HTTP|METRICS|ADMIN)_(HOST|PORT)" "TENSOR_PARALLEL_.*" "KV_EVENTS.*" }}
{{- range $key, $value := .Values.settings }}
{{- if has $key (list "HF_TOKEN" "OTEL_EXPORTER_OTLP_HEADERS") }}
{{- fail (printf "settings.%s: %s" $key $secret) }}
{{- else if regexMatch (printf "^(QUIRE_(%s)|HF_HOME)$" (concat $flags $more | join "|")) $key }}
{{- fail (printf "settings.%s: %s" $key $own) }}
{{- end }}
{{ $key }}: {{ include "quire.text" $value | quote }}
{{- end }}
{{- with .Values.model.name }}
QUIRE_MODEL: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Annotations of a pod: (list $ VALUES-WITH-ANNOTATIONS). */}}
{{- define "quire.annotations" -}}
checksum/settings: {{ include "quire.settings" (index . 0) | sha256sum }}
{{- with (index . 1).annotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What every pod has: (dict "root" $ "roles" LIST "place" VALUES-WITH-NODE-SELECTOR "grace" SECONDS). */}}
{{- define "quire.podDefaults" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # Do not change the owner of each file of a models volume at each start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .place.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .place.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .place.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with .place.runtimeClassName }}
runtimeClassName: {{ quote . }}
{{- end }}
{{- with .place.priorityClassName }}
priorityClassName: {{ quote . }}
{{- end }}
volumes:
  - {name: tmp, emptyDir: {}}
  # Sockets by which the containers of a pod call each other.
  - {name: run, emptyDir: {}}
  {{- with .root.Values.model.volume }}
  - {{ merge (dict "name" "models") . | toJson }}
  {{- end }}
  - {{ merge (dict "name" "cache") (.root.Values.model.cacheVolume | default (dict "emptyDir" dict)) | toJson }}
  {{- range .roles }}
  {{- if $.root.Values.tls.enabled }}
  - name: {{ . }}-certs
    secret:
      secretName: {{ index $.root.Values.tls.secrets . | quote }}
      defaultMode: 0440
      {{- if $.root.Values.tls.issuer }}
      items:
        - {key: ca.crt, path: ca.pem}
        - {key: tls.crt, path: {{ . }}.pem}
        - {key: tls.key, path: {{ . }}.key}
      {{- end }}
  {{- end }}
  {{- if and (eq . "gateway") $.root.Values.gateway.keysSecret }}
  - name: keys
    secret: {secretName: {{ quote $.root.Values.gateway.keysSecret }}, defaultMode: 0440}
  {{- end }}
  {{- if eq . "worker" }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ quote $.root.Values.replica.worker.sharedMemory }}}
  {{- end }}
  {{- end }}
{{- end }}

{{/* What every container has: (list $ ROLE). */}}
{{- define "quire.containerDefaults" -}}
{{- $root := index . 0 }}
{{- $role := index . 1 }}
image: {{ index $root.Values.images $role | quote }}
imagePullPolicy: {{ $root.Values.imagePullPolicy }}
envFrom:
  - configMapRef: {name: {{ include "quire.name" $root }}-settings}
  {{- with $root.Values.settingsSecret }}
  - secretRef: {name: {{ quote . }}}
  {{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: run, mountPath: /run/quire}
  {{- if ne $role "scheduler" }}
  - {name: cache, mountPath: /cache}
  {{- if $root.Values.model.volume }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  {{- end }}
  {{- if $root.Values.tls.enabled }}
  - {name: {{ $role }}-certs, mountPath: /certs, readOnly: true}
  {{- end }}
  {{- if and (eq $role "gateway") $root.Values.gateway.keysSecret }}
  - {name: keys, mountPath: /keys, readOnly: true}
  {{- end }}
  {{- if eq $role "worker" }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
env:
  {{- if $root.Values.tls.enabled }}
  - {name: QUIRE_TLS_DIR, value: /certs}
  {{- end }}
  {{- if ne $role "scheduler" }}
  - {name: HF_HOME, value: /cache}
  {{- with $root.Values.model.tokenSecret }}
  - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ quote . }}, key: HF_TOKEN}}}
  {{- end }}
  {{- end }}
{{- end }}

{{/* Probes: (dict "address" ADDRESS "leaves" FAILURES-UNTIL-NOT-READY). */}}
{{- define "quire.probes" -}}
{{- $check := list "python" "/opt/quire/healthcheck.py" }}
# A service that waits for another one is alive. Workers answer while they load a model; importing torch from a cold
# disk may take minutes.
startupProbe:
  exec: {command: {{ concat $check (list "--alive" .address) | toJson }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
# Each check starts a process.
readinessProbe:
  exec: {command: {{ append $check .address | toJson }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ .leaves }}
livenessProbe:
  exec: {command: {{ concat $check (list "--alive" .address) | toJson }}}
  periodSeconds: 20
  timeoutSeconds: 5
{{- end }}

{{- define "quire.gateway" -}}
{{- $name := include "quire.name" . }}
{{- $inside := eq .Values.gateway.placement "replicas" }}
- name: gateway
  {{- include "quire.containerDefaults" (list . "gateway") | nindent 2 }}
  args:
    - gateway
    - --grpc-host=0.0.0.0
    - --grpc-port=50051
    - --http-host=0.0.0.0
    - --http-port=8000
    # The socket for health checks, which need no certificate there.
    - --local-socket=/run/quire/gateway.sock
    {{- if $inside }}
    - --schedulers=unix:/run/quire/scheduler.sock
    {{- else }}
    # Each address of this name is a replica; gateways follow it while replicas come and go.
    - --schedulers=dns:///{{ include "quire.schedulers" . }}:50052
    {{- end }}
    {{- if .Values.gateway.keysSecret }}
    - --keys-file=/keys/keys.json
    {{- end }}
    {{- if .Values.gateway.openMetrics }}
    - --open-metrics
    {{- end }}
    - --metrics-host=0.0.0.0
    - --metrics-port=9400
    # On loopback, for `kubectl port-forward`.
    - --admin-port=9500
    {{- range .Values.gateway.args }}
    - {{ . | quote }}
    {{- end }}
  ports:
    - {name: grpc, containerPort: 50051}
    - {name: http, containerPort: 8000}
    - {name: metrics, containerPort: 9400}
  resources: {{ toJson .Values.gateway.resources }}
  # While a worker restarts, gateways take requests, which wait for up to --connect-timeout: in separate pods no gateway
  # leaves before that. Behind an InferencePool other replicas take the requests.
  {{- $waits := .Values.settings.QUIRE_CONNECT_TIMEOUT | default 30 | float64 }}
  {{- $leaves := ternary 1 (divf $waits 10 | ceil | int | add1) $inside }}
  {{- include "quire.probes" (dict "address" "unix:/run/quire/gateway.sock" "leaves" $leaves) | nindent 2 }}
  # A draining gateway refuses new requests: first let senders learn that it leaves.
  lifecycle:
    preStop:
      exec: {command: [sleep, "8"]}
{{- end }}

{{- define "quire.scheduler" -}}
{{- $name := include "quire.name" . }}
{{- $inside := eq .Values.gateway.placement "replicas" }}
- name: scheduler
  {{- if $inside }}
  restartPolicy: Always
  {{- end }}
  {{- include "quire.containerDefaults" (list . "scheduler") | nindent 2 }}
    - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  {{- $workers := list }}
  {{- range $i := until (int .Values.replica.ranksPerNode) }}
  {{- $workers = append $workers (printf "unix:/run/quire/worker-%d.sock" $i) }}
  {{- end }}
  {{- range $node := untilStep 1 (int .Values.replica.nodes) 1 }}
  {{- range $i := until (int $.Values.replica.ranksPerNode) }}
  {{- $port := add 50053 $i }}
  {{- $workers = append $workers (printf "$(POD_NAME)-%d.%s-replica.%s.svc:%d" $node $name $.Release.Namespace $port) }}
  {{- end }}
  {{- end }}
  args:
    - scheduler
    - --listen={{ ternary "unix:/run/quire/scheduler.sock" "0.0.0.0:50052" $inside }}
    - --workers={{ join "," $workers }}
    {{- with .Values.replica.role }}
    - --role={{ . }}
    {{- end }}
    - --metrics-host=0.0.0.0
    - --metrics-port=9401
    - --admin-port=9501
    {{- if .Values.inferencePool.kvEvents.enabled }}
    - --kv-events=tcp://*:5557
    - --kv-events-replay=tcp://*:5558
    {{- $empty := "inferencePool.kvEvents.model is empty; it is the name of the model that the scorer asks for" }}
    - {{ printf "--kv-events-topic=kv@$(POD_IP)@%s" (required $empty .Values.inferencePool.kvEvents.model) | quote }}
    {{- end }}
    {{- range .Values.replica.scheduler.args }}
    - {{ . | quote }}
    {{- end }}
  ports:
    {{- if not $inside }}
    - {name: scheduler, containerPort: 50052}
    {{- end }}
    - {name: metrics-sched, containerPort: 9401}
    {{- if .Values.inferencePool.kvEvents.enabled }}
    - {name: kv-events, containerPort: 5557}
    - {name: kv-replay, containerPort: 5558}
    {{- end }}
  resources: {{ toJson .Values.replica.scheduler.resources }}
  {{- $address := ternary "unix:/run/quire/scheduler.sock" "127.0.0.1:50052" $inside }}
  {{- include "quire.probes" (dict "address" $address "leaves" 2) | nindent 2 }}
{{- end }}

{{/* The ranks of one pod, beside the scheduler or on a node without one: (list $ true|false). */}}
{{- define "quire.workers" -}}
{{- $root := index . 0 }}
{{- $leads := index . 1 }}
{{- $nodes := int $root.Values.replica.nodes }}
{{- $here := int $root.Values.replica.ranksPerNode }}
{{- $moves := and $leads (eq $root.Values.gateway.placement "pods") }}
{{- range $i := until $here }}
- name: worker-{{ $i }}
  {{- if $leads }}
  # A sidecar: it starts before the scheduler and ends after it, so that requests can finish.
  restartPolicy: Always
  {{- else }}
  # The rank of a node, which the LeaderWorkerSet numbers.
  command: [sh, -c, 'QUIRE_TENSOR_PARALLEL_RANK=$((LWS_WORKER_INDEX * {{ $here }} + {{ $i }})) exec quire "$@"', quire]
  {{- end }}
  {{- include "quire.containerDefaults" (list $root "worker") | nindent 2 }}
    # torch needs a user name, which the image does not have.
    - {name: USER, value: quire}
    {{- if $moves }}
    - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    {{- end }}
    {{- $requests := $root.Values.replica.worker.resources.requests | default dict }}
    {{- if and (hasKey $requests "cpu") (not (hasKey $root.Values.settings "QUIRE_NUM_THREADS")) }}
    # Rounded up to whole processors.
    - {name: QUIRE_NUM_THREADS, valueFrom: {resourceFieldRef: {resource: requests.cpu, divisor: "1"}}}
    {{- end }}
  args:
    - worker
    - --device={{ $root.Values.replica.worker.device }}
    - --listen={{ if $leads }}unix:/run/quire/worker-{{ $i }}.sock{{ else }}0.0.0.0:{{ add 50053 $i }}{{ end }}
    {{- if $moves }}
    # The port from which workers of other replicas fetch blocks of moving requests.
    - --transfer-listen=0.0.0.0:{{ add 50153 $i }}
    {{- $service := printf "%s-replica.%s.svc" (include "quire.name" $root) $root.Release.Namespace }}
    - --transfer-endpoint=$(POD_NAME).{{ $service }}:{{ add 50153 $i }}
    {{- end }}
    {{- if gt (mul $nodes $here) 1 }}
    - --tensor-parallel-size={{ mul $nodes $here }}
    {{- if $leads }}
    - --tensor-parallel-rank={{ $i }}
    {{- end }}
    - --tensor-parallel-address={{ ternary "127.0.0.1" "$(LWS_LEADER_ADDRESS)" (eq $nodes 1) }}:50063
    {{- end }}
    - --metrics-host=0.0.0.0
    - --metrics-port={{ add 9410 $i }}
    - --admin-port={{ add 9510 $i }}
    {{- range $root.Values.replica.worker.args }}
    - {{ . | quote }}
    {{- end }}
  ports:
    {{- if not $leads }}
    - {name: worker-{{ $i }}, containerPort: {{ add 50053 $i }}}
    {{- end }}
    {{- if $moves }}
    - {name: transfer-{{ $i }}, containerPort: {{ add 50153 $i }}}
    {{- end }}
    - {name: metrics-rank-{{ $i }}, containerPort: {{ add 9410 $i }}}
  resources: {{ toJson $root.Values.replica.worker.resources }}
  {{- $address := ternary (printf "unix:/run/quire/worker-%d.sock" $i) (printf "127.0.0.1:%d" (add 50053 $i)) $leads }}
  {{- include "quire.probes" (dict "address" $address "leaves" 2) | nindent 2 }}
{{- end }}
{{- end }}

{{/* The pod with the scheduler. */}}
{{- define "quire.replicaPod" -}}
{{- $inside := eq .Values.gateway.placement "replicas" }}
metadata:
  labels:
    {{- include "quire.replicaLabels" . | nindent 4 }}
    {{- if $inside }}
    # The endpoint picker reads metrics under vLLM's names; the second label is the former name of the first.
    llm-d.ai/engine-type: vllm
    inference.networking.k8s.io/engine-type: vllm
    {{- end }}
  annotations:
    {{- include "quire.annotations" (list . .Values.replica) | nindent 4 }}
spec:
  {{- $roles := ternary (list "gateway" "scheduler" "worker") (list "scheduler" "worker") $inside }}
  # Longer than the pause before the stop and the --drain-timeout of each service that drains here, one after the other.
  {{- $drain := include "quire.drain" . | int }}
  {{- $grace := ternary (add 20 $drain $drain) (add 15 $drain) $inside }}
  {{- include "quire.podDefaults" (dict "root" . "roles" $roles "place" .Values.replica "grace" $grace) | nindent 2 }}
  initContainers:
    {{- include "quire.workers" (list . true) | nindent 4 }}
    {{- if $inside }}
    {{- include "quire.scheduler" . | nindent 4 }}
    {{- end }}
  containers:
    {{- include (ternary "quire.gateway" "quire.scheduler" $inside) . | nindent 4 }}
{{- end }}

{{- define "quire.schedulers" -}}
{{- $service := ternary "replica" "schedulers" (eq (int .Values.replica.nodes) 1) }}
{{- printf "%s-%s.%s.svc" (include "quire.name" .) $service .Release.Namespace }}
{{- end }}
